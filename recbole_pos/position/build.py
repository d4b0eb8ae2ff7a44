"""From ``position: [names]`` to modules: build the named schemes, and compose those of a layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn

from recbole_pos.errors import UsageError
from recbole_pos.layers.attention import Dropout
from recbole_pos.layers.hooks import (
    PROJECTIONS,
    AttentionPosition,
    Dimensions,
    InputPosition,
    PositionScheme,
    Projected,
    add_positions,
    replaces_attention,
    require_result,
)
from recbole_pos.layers.sequence_batch import SequenceBatch
from recbole_pos.position.schemes import SCHEMES, scheme_names
from recbole_pos.values import Options, shown


class Schemes:
    """The position schemes of one model: an encoding of its input, and a scheme for each layer.

    A position scheme is a module that tells a model about order or time. It either adds to the
    input or changes attention.

    Attributes:
        input: the encoding of the input; several encodings are wrapped in one ``ComposeInput``.
        needs_time: whether any scheme reads the times of interactions.
        reads_request: whether queries of any scheme read the time at which the next item is
            requested, if it is known; else the time of the interaction itself stands in for that.
        assume_order: names of the schemes that need times which never fall along a history.
    """

    def __init__(
        self, classes: Mapping[str, type[PositionScheme]], dimensions: Dimensions, options: Options
    ) -> None:
        """Build the encoding of the input; :meth:`attention` builds the schemes of each layer.

        A position scheme is a module that tells a model about order or time. It either adds to the
        input (``InputPosition``) or changes attention.

        Args:
            classes: class of each position scheme, by its name in ``position``.
            dimensions: sizes of the model.
            options: values of the schemes' options, by name.
        """
        self.classes, self.dimensions, self.options = classes, dimensions, options
        self._layers: list[Compose] = []  # the schemes of the layers so far

        # The encoding of the input. Several are wrapped in one module, which applies them in order.
        # A single one is not wrapped, so that its weights have short names in a checkpoint.
        encodings = self._build(InputPosition, layer=0)  # name -> module
        if len(encodings) == 1:
            self.input: nn.Module = next(iter(encodings.values()))
        else:
            self.input = ComposeInput(encodings)

        # What the schemes ask of the data: whether any reads the times of interactions, whether any
        # reads the time at which the next item is requested, and the names of those that need
        # interactions in the order of their times.
        self.needs_time = any(cls.needs_time for cls in classes.values())
        self.reads_request = any(cls.reads_request for cls in classes.values())
        self.assume_order = [name for name, cls in classes.items() if cls.assumes_order]

    def attention(self) -> AttentionPosition:
        """Build what changes the attention of the next layer: all its position schemes as one.

        A model calls this once for each layer, in order. The schemes of each layer have parameters
        of their own. Some share a few with all layers: in ``tisas`` the tables of positions and
        times, which later layers take over from the first.

        Returns:
            One scheme, whose methods call those of all.
        """
        layer = len(self._layers)  # 0 at the first call
        # only the schemes that change attention, not those that change the input
        composed = Compose(self._build(AttentionPosition, layer))
        if layer > 0:
            composed.share_with(self._layers[0])
        self._layers.append(composed)
        return composed

    def _build(self, base: type[PositionScheme], layer: int) -> dict[str, Any]:
        """Build the position schemes that change the input, or those that change attention.

        Args:
            base: ``InputPosition`` or ``AttentionPosition``; only its subclasses are built.
            layer: number of the layer, from 0.

        Returns:
            The schemes by name, in the order of ``position``.
        """
        dimensions = replace(self.dimensions, layer=layer)
        schemes = {}
        for name, cls in self.classes.items():
            if issubclass(cls, base):
                options = {key: self.options[key] for key in cls.options}  # those that it reads
                schemes[name] = cls(dimensions, **options)
        return schemes


def build_schemes(
    position: str | list[str],
    dimensions: Dimensions,
    options: Options,
    *,
    has_attention: bool = False,
) -> Schemes:
    """Build the position schemes of one model from their names.

    A position scheme is a module that tells a model about order or time, such as ``rope``.

    Args:
        position: name of a scheme or list of names; an empty list for no position at all.
        dimensions: sizes of the model.
        options: values of the schemes' options by name (RecBole's config, or a dict).
        has_attention: whether the model has layers of attention, for which it calls
            ``Schemes.attention``.

    Returns:
        The encoding of the input, and what builds the schemes of each layer.

    Raises:
        UsageError: for an unknown name, a bad option, schemes that cannot share a layer, a scheme
            inside attention for a model that has none, or one that would reveal later times.
    """
    classes: dict[str, Any] = {name: SCHEMES[name] for name in scheme_names(position)}

    # These schemes read the time of the newest interaction of a history. A model that also learns
    # to predict after older ones would know a time in their future.
    leaking = [name for name, cls in classes.items() if cls.reads_newest_time]
    if leaking and _predicts_at_older(options):
        raise UsageError(
            f"position: {', '.join(leaking)} reads the time of the newest interaction or request, "
            "which tells the states of earlier ones about later times; set train_windows: prefix"
        )

    # Schemes that change attention would be ignored in a model without it. ``nope`` (no position)
    # is allowed everywhere, since it does nothing anyway.
    changing = [name for name, cls in classes.items() if issubclass(cls, AttentionPosition)]
    ignored = [name for name in changing if name != "nope"]
    if ignored and not has_attention:
        raise UsageError(
            f"position: found {', '.join(ignored)}, expected schemes at the input, since the model "
            "has no attention; leave it out, or pass has_attention=True to build_schemes in a "
            "model that calls schemes.attention in each layer"
        )
    return Schemes(classes, dimensions, options)


def _predicts_at_older(options: Options) -> bool:
    """Return whether a model learns to predict the next item after every interaction of a history.

    It does with ``augmentation: all_positions``. With ``train_windows: prefix`` it does not: every
    prefix of a history is an example, with one prediction after its newest interaction.
    """
    if "augmentation" not in options or options["augmentation"] != "all_positions":
        return False
    return options["train_windows"] != "prefix"


def build_row_encodings(options: Options, max_length: int, hidden_size: int) -> nn.ModuleList:
    """Build the position schemes of a model that adds positions to its input and nowhere else.

    A position scheme is a module that tells a model about order or time.

    Args:
        options: options of the model: ``position``, the name of a scheme or a list of names
            (``nope`` for no position); ``initializer_range``; and the options of these schemes.
        max_length: the most interactions of a history.
        hidden_size: size of the item vectors that positions are added to.

    Returns:
        Modules with a method ``rows``, which returns the encodings of positions; none for ``nope``.

    Raises:
        UsageError: see :func:`build_schemes`; also for a scheme without ``rows``.
    """
    position = options["position"]
    allowed = [name for name, cls in SCHEMES.items() if hasattr(cls, "rows")]
    rejected = [name for name in scheme_names(position) if name not in (*allowed, "nope")]
    if rejected:
        raise UsageError(
            f"position: {shown(position)}: this model takes input encodings that depend on the "
            f"position alone ({', '.join(allowed)}) or nope; found {', '.join(rejected)}"
        )

    dimensions = Dimensions(
        max_length=max_length,
        hidden_size=hidden_size,
        n_heads=1,  # these schemes are not in attention
        initializer_range=options["initializer_range"],
    )
    encoding = build_schemes(position, dimensions, options).input
    # several encodings, or none, are wrapped in a ComposeInput
    encodings = encoding.schemes.values() if isinstance(encoding, ComposeInput) else [encoding]
    return nn.ModuleList(encodings)


class Compose(AttentionPosition):
    """The attention schemes of one layer as one: hooks run in the order given, biases add up.

    A position scheme is a module that tells a model about order or time. One that overrides
    ``attend`` computes the output of attention itself, and so replaces it.

    Attributes:
        schemes: the schemes by their registered names.
        replacing: name of the scheme that replaces attention, or None. It has no others beside it.
        projections: which of query, key and value the layer must compute for the schemes.
    """

    def __init__(self, schemes: Mapping[str, AttentionPosition]) -> None:
        """Keep the position schemes of one layer, and find the one that replaces attention.

        A position scheme is a module that tells a model about order or time. Most change query, key
        and value or add a bias; one may compute the output of attention itself.
        ``projections`` says which of query, key and value the layer must compute for them: all
        (PROJECTIONS), or those that the scheme in place of attention asks for.

        Args:
            schemes: position schemes inside attention, by name.

        Raises:
            UsageError: if one that replaces attention is not alone: the others would be ignored.
        """
        super().__init__()
        self.schemes = nn.ModuleDict(schemes)
        replacing = [name for name, scheme in schemes.items() if replaces_attention(type(scheme))]
        if replacing and len(schemes) > 1:
            raise UsageError(
                f"position: {replacing[0]} replaces attention and cannot share a layer with other "
                f"attention schemes (found {', '.join(schemes)})"
            )
        self.replacing = replacing[0] if replacing else None
        self.projections = schemes[replacing[0]].projections if replacing else PROJECTIONS

    def parts(self) -> dict[str, AttentionPosition]:
        return dict(cast("Iterable[tuple[str, AttentionPosition]]", self.schemes.items()))

    def share_with(self, first: Compose) -> None:
        """Let each position scheme of this layer take over tables of its twin in the first one.

        Args:
            first: the schemes of the first layer, of the same names.
        """
        shared = first.parts()
        for name, scheme in self.parts().items():
            scheme.share_with(shared[name])

    def rotate(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
        """Return queries and keys, turned by the position schemes of a layer, one after the other.

        Args:
            q, k: [m, h, e] queries and keys.
            batch: the histories.
        """
        for scheme in self.parts().values():
            # each rotates what the one before has rotated; its result, maybe a user's, is checked
            rotated = scheme.rotate(q, k, batch)
            q, k = (require_result(x, q.dtype, q.shape, scheme, "rotate") for x in rotated)
        return q, k

    def mix_keys(self, k: Tensor, batch: SequenceBatch) -> Tensor:
        """Let each position scheme of a layer mix keys with older ones, one scheme after the other.

        A scheme may be a user's own, so ``require_result`` checks the shape of what it returns.

        Args:
            k: [m, h, e] keys of the m interactions of the batch, in h heads.
            batch: the histories.

        Returns:
            [m, h, e] the keys as the last scheme has returned them.
        """
        for scheme in self.parts().values():
            k = require_result(scheme.mix_keys(k, batch), k.dtype, k.shape, scheme, "mix_keys")
        return k

    def mix_values(self, v: Tensor, batch: SequenceBatch) -> Tensor:
        """Let each position scheme of a layer mix values with older ones, one after the other.

        A scheme may be a user's own, so ``require_result`` checks the shape of what it returns.

        Args:
            v: [m, h, e] values of the m interactions of the batch, in h heads.
            batch: the histories.

        Returns:
            [m, h, e] the values as the last scheme has returned them.
        """
        for scheme in self.parts().values():
            v = require_result(scheme.mix_values(v, batch), v.dtype, v.shape, scheme, "mix_values")
        return v

    def bias(self, q: Tensor, k: Tensor, batch: SequenceBatch) -> Tensor | None:
        """Add up what the position schemes of a layer add to the logits of attention.

        ``require_result`` checks the shape of each term, since a scheme may be a user's own.

        Args:
            q, k: [b, h, t, e] queries and keys.
            batch: the histories.

        Returns:
            A tensor that broadcasts to [b, h, t, t]; None if no scheme adds anything.
        """
        shape = (*q.shape[:-1], k.size(-2))  # [b, h, t, t]
        total: Tensor | None = None
        for scheme in self.parts().values():  # the schemes of this layer by name
            term = scheme.bias(q, k, batch)
            if term is not None:
                term = require_result(term, q.dtype, shape, scheme, "bias", may_broadcast=True)
                total = term if total is None else total + term
        return total

    def attend(
        self,
        query: Projected,
        key: Projected,
        value: Tensor,
        batch: SequenceBatch,
        dropout: Dropout,
    ) -> Tensor | None:
        """Return the output of the position scheme that replaces attention, if there is one.

        Args:
            query, key, value: [m, h, e], history after history; None where the scheme does not
                need it.
            batch: the histories.
            dropout: dropout on attention weights.

        Returns:
            [m, h, e], or None if no scheme replaces attention, so that the layer computes it.

        Raises:
            UsageError: if the scheme, which may be a user's own, returns anything else.
        """
        if self.replacing is None:  # the name of the scheme that replaces attention
            return None
        scheme = self.parts()[self.replacing]  # ``parts`` returns the schemes by name
        out = scheme.attend(query, key, value, batch, dropout)
        return require_result(out, value.dtype, value.shape, scheme, "attend")


class ComposeInput(InputPosition):
    """Several input encodings, applied in the order given."""

    def __init__(self, schemes: Mapping[str, InputPosition]) -> None:
        super().__init__()
        self.schemes = nn.ModuleDict(schemes)

    def forward(self, x: Tensor, batch: SequenceBatch) -> Tensor:
        """Return item vectors x [m, d] with the encodings of all position schemes added."""
        for scheme in self.schemes.values():
            x = add_positions(scheme, x, batch)
        return x
