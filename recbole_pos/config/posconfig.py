"""PosConfig, the configuration of one run: RecBole's Config with the plugin's defaults and checks.

It gathers options from RecBole's and the plugin's yaml files, the dataset's, the user's files and
the call, refuses unknown keys and wrong values, and evaluates no text as Python, as RecBole would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import recbole
from recbole.config import Config
from recbole.utils import ModelType, get_model

from recbole_pos.config import options as option_table
from recbole_pos.config import sources
from recbole_pos.config.checks import check_negatives, check_together, check_value
from recbole_pos.config.plugins import find_modules, import_plugins, take_model
from recbole_pos.data.candidates import masks_history
from recbole_pos.data.identity import FILTERS
from recbole_pos.data.item_vectors import make_absolute, to_file
from recbole_pos.data.location import find_atomic_file, locate_dataset
from recbole_pos.errors import PosError, UnknownKey, UsageError
from recbole_pos.model import models
from recbole_pos.plain import to_plain
from recbole_pos.values import nearest, shown
from recbole_pos.yaml_files import ROOT, PackagedLoader, read_properties, read_yaml

WHEEL_DATASETS = Path(recbole.__file__).parent / "dataset_example"
EXTRA_KEYS = {"model", "dataset"}  # keys that name a run and have no default
DERIVED_KEYS = {"MODEL_TYPE"}  # keys that RecBole computes and keeps among the options
_NOT_KEPT = DERIVED_KEYS | option_table.REFUSED  # left out of a run's config.yaml
_NO_FILE = "configuration"  # for messages, the place of options that come from no file
STARTS = ("init_from", "update_from")  # options: the run whose weights another run starts from
PLUGINS = "plugins"  # option: modules that register the model or its schemes
_WINDOWS_PER_BATCH = 128  # default of models whose examples are windows of histories


def merge_options(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    """Return the options of two sources together; where both have an option, ``high`` wins.

    Only ``eval_args``, a mapping, is merged key by key: ``{"split": a, "mode": b}`` and
    ``{"mode": c}`` give ``{"split": a, "mode": c}``.

    Args:
        low: option -> value, of the source with lower priority.
        high: option -> value, of the source with higher priority.
    """
    merged = {**low, **high}
    low_args, high_args = low.get("eval_args"), high.get("eval_args")
    if low_args and high_args and isinstance(low_args, dict) and isinstance(high_args, dict):
        merged["eval_args"] = {**low_args, **high_args}
    return merged


class PosConfig(Config):
    """Configuration of one run, for the plugin's models and RecBole's.

    Priority, lowest first: RecBole's yaml files, ``properties/`` of the plugin, ``<dataset>.yaml``
    beside the atomic files, ``config_file_list`` in order (in each file, parts under ``for`` that
    this run takes win over the rest), ``config_dict``; ``eval_args`` is merged key by key.

    Args:
        model: name of a plugin model, of a usable model of RecBole or of one that was registered,
            or a class; None to read it from a file.
        dataset: name of the dataset; None to read it from a file.
        config_file_list: paths of yaml files, or names of presets.
        config_dict: options as plain values.
        strict: whether an option that changes nothing for this model and protocol is an error,
            where it is given in ``config_dict`` or in a file of the user's; not for a trial, whose
            options depend on each other. The configuration of a run that exists is never strict.

    Raises:
        UsageError: naming an unknown key, a wrong value, or anything else that RecBole's Config
            refuses.

    Attributes:
        plain: the complete configuration as given, before RecBole derives values from it; writing
            it to a yaml file and running that file repeats the run.
        files: (file, options) of each config file, the dataset's first.
        own_files: paths of the config files that the user wrote; presets are not among them.
        public: facts in the yaml of a public dataset.
        free: options that only a custom model or scheme has, and that may hold anything.
        sources: option -> file that gave it.
        asked_for: options that a model read although no source has them.
        loss_reason: why SCE has replaced the default loss; empty if it has not.
    """

    def __init__(
        self,
        model: str | type | None = None,
        dataset: str | None = None,
        config_file_list: list[str] | None = None,
        config_dict: dict[str, Any] | None = None,
        strict: bool = True,
    ) -> None:
        """Gather the options of a run from files and the call, and check them.

        Args:
            model: name or class of the model; None to read it from a file.
            dataset: name of the dataset; None to read it from a file.
            config_file_list: paths of yaml files, or names of presets.
            config_dict: options of the call, which win over those of files.
            strict: whether a given option that has no effect in this run is an error.
        """
        self.strict = strict
        self.public: dict[str, Any] = {}  # facts on a public dataset
        self.asked_for: set[str] = set()  # options that a model reads and no source has
        self.loss_reason = ""  # why a loss has replaced the default one
        self._call_options = dict(config_dict or {})
        try:
            self._build(model, dataset, config_file_list or [])
        except PosError:
            raise
        # RecBole raises these for options that it refuses.
        except (ValueError, TypeError, LookupError, RuntimeError) as error:
            raise UsageError(f"configuration: {error.args[0] if error.args else error}") from error

    def _build(self, model: str | type | None, dataset: str | None, files: list[str]) -> None:
        """Do what RecBole's ``Config.__init__`` does, with the plugin's sources and checks.

        RecBole's own, which is not called, would read options from ``sys.argv``, and evaluate text
        as Python. Its methods are called one by one instead. RecBole calls defaults
        ``internal_config_dict``, options that are given ``external_config_dict``, and both together
        ``final_config_dict``.

        Args:
            model: name or class of the model; None to read it from a file.
            dataset: name of the dataset; None to read it from a file.
            files: paths of config files, or names of presets. ``self._call_options``, the options
                of the call, win over those of files.
        """
        # Read the files.
        self.compatibility_settings()
        self._init_parameters_category()
        self.yaml_loader = PackagedLoader  # of RecBole's own files
        self.files: list[tuple[str | Path, dict[str, Any]]] = []
        self.own_files = []
        for file in files:
            path = sources.find_config_file(file)
            self.files.append((file, read_yaml(path)))
            if not path.is_relative_to(ROOT):  # where the presets of this package are
                self.own_files.append(str(file))
        vectors = self._call_options.get("item_vectors")
        if vectors is not None:  # content vectors of items in memory become a file
            self._call_options["item_vectors"] = to_file(vectors)

        # Find model and dataset, whose names may stand in a file.
        model_name = models.ensure_registered(model) if isinstance(model, type) else model
        plugins = self._import_plugins(model_name)
        self.model, self.dataset = self._find_names(model_name, dataset)
        self._read_dataset_file()

        # Merge the options that are given: files may have some for certain models and position
        # schemes only. Keep which file gave each option, for messages.
        position = self._merge_user_options(self.model).get("position")
        schemes = sources.list_positions(position, self.model)
        self.external_config_dict = self._merge_user_options(self.model, *schemes)
        self.sources = {
            key: location
            for location, options in self._list_parts(self.model, *schemes)
            for key in options
            if key not in self._call_options
        }

        # Keep the modules that register the model, schemes and metrics, so that a process which
        # reads the configuration of this run knows them, too.
        self.model_class = self._find_class()
        metrics = self.external_config_dict.get("metrics")
        modules = list(dict.fromkeys([*plugins, *find_modules(self.model, schemes, metrics)]))
        if modules:
            self.external_config_dict[PLUGINS] = modules

        # Read the defaults; plug.py has added the plugin's for models that RecBole gets from it
        # (``is_served``).
        self._load_internal_config_dict(self.model, self.model_class, self.dataset)
        if not models.is_served(self.model):
            position = self.external_config_dict.get("position")
            self.internal_config_dict.update(sources.plugin_defaults(self.model, position))

        # Check the options, and merge them with the defaults.
        self.strict = self.strict and not self._find_run_files()
        self.free = sources.free_options(self.model, schemes)
        self._check_user_options()
        self.final_config_dict = self._merge_defaults()
        final = self.final_config_dict.items()
        check_together({key: value for key, value in final if key not in self.free}, self.model)
        self.plain = self._make_plain()  # before RecBole derives values such as the device
        if self.strict:
            self._refuse_unread()

        # Let RecBole derive values from them, such as how negatives are sampled (items to contrast
        # with the target). A model that only counts needs none; ``plain`` keeps the option as it
        # was given, since the names of runs are made of it.
        self._set_default_parameters()
        self._init_device()
        if models.is_untrained(self.model):
            self.final_config_dict["train_neg_sample_args"] = None
        self._set_train_neg_sample_args()
        check_negatives(self.final_config_dict, self.model)
        self._set_eval_neg_sample_args("valid")
        self._set_eval_neg_sample_args("test")

    def __getitem__(self, key: str) -> Any:
        """Return an option's value; for an unknown one None, as in RecBole, and note its name."""
        final = self.__dict__.get("final_config_dict", {})  # it is missing while options are read
        if key not in final:
            self.asked_for.add(key)
        return final.get(key)

    # --- where options come from ---

    def _import_plugins(self, model: str | None) -> list[str]:
        """Import the modules that config files or the call name under ``plugins``.

        Their import registers custom models and position schemes, which can then be looked up by
        name. ``self.files`` has the options of each file, ``self._call_options`` those of the call.

        Args:
            model: name of the model in the call; None if it stands in a file.

        Returns:
            Names of the modules.
        """
        contents = [*self.files, (_NO_FILE, self._call_options)]  # (place for messages, options)
        modules: list[str] = []
        for file, content in contents:
            modules += import_plugins(content.get(PLUGINS), str(file))

        # A module may also have a class of the model's name without registering it.
        for name in (model, *(content.get("model") for _, content in contents)):
            if name:
                take_model(str(name), modules)
        return modules

    def _list_parts(self, *names: str) -> list[tuple[str, dict[str, Any]]]:
        """Return the parts of all config files whose options this run takes.

        A file has options for every run and, under ``for``, options for runs with a certain model
        or position scheme, such as ``for: {SASRec: {n_heads: 1}}``.

        Args:
            names: the model of the run and its position schemes.

        Returns:
            (place in a file, options) of each part; later ones win over earlier ones.
        """
        parts = []
        for file, content in self.files:
            parts += sources.select_parts(content, names, file)
        return parts

    def _merge_user_options(self, *names: str) -> dict[str, Any]:
        """Return option -> value, of all options that files and the call give, without defaults.

        Later files win over earlier ones, and the call (``self._call_options``) wins over files.

        Args:
            names: the model of the run and its position schemes, as far as they are known. A file
                may have options for some models or schemes only (under ``for``), which hold if they
                are among these names.
        """
        merged: dict[str, Any] = {}
        for _, options in self._list_parts(*names):
            merged = merge_options(merged, options)
        return merge_options(merged, self._call_options)

    def _find_names(self, model: str | None, dataset: str | None) -> tuple[str, str]:
        """Return the names of model and dataset, from the call or else from the files.

        Args:
            model: name of the model in the call, if it has one.
            dataset: name of the dataset in the call, or its folder; it may be missing, too.

        Returns:
            The name of the model, and that of the dataset.

        Raises:
            UsageError: if one is given nowhere.
        """
        options = self._merge_user_options()
        model = model or options.get("model")
        dataset = dataset or options.get("dataset")
        if not model or not dataset:
            missing = "model (-m)" if not model else "dataset (-d)"
            raise UsageError(f"no {missing} given, on the command line or in a config file")

        # ``locate_dataset`` finds where a dataset is; it is looked for below ``data_path``.
        # A dataset that is given as a folder has the name of the folder; ``parent`` is the folder
        # that this one is in, and None for a dataset that is given by its name.
        data_path = self._merge_user_options(str(model)).get("data_path") or "dataset/"
        name, parent = locate_dataset(str(dataset), str(data_path))
        if parent is not None:
            self._call_options["data_path"] = parent
        return str(model), name

    def _read_dataset_file(self) -> None:
        """Read ``<dataset>.yaml`` in the dataset's folder, as a config file of lowest priority.

        Its options are put before those of all other files in ``self.files``. Under ``public`` it
        may have facts on a public dataset, such as its number of users, which are no options; they
        go to ``self.public``. Nothing happens if there is no such file.

        Raises:
            UsageError: if the file names plugins. A dataset may come from a stranger, and must not
                have code imported.
        """
        folder = Path(str(self._merge_user_options(self.model).get("data_path", "dataset/")))
        file = folder / self.dataset / f"{self.dataset}.yaml"
        if file.is_file():
            content = read_yaml(file)
            # The options are kept with the facts, since facts hold only for these options.
            self.public = {**(content.pop("public", None) or {}), **content}
            self.files.insert(0, (file, content))
            if PLUGINS in content:
                raise UsageError(f"{file}: {PLUGINS} belong to a run, and not to a dataset")

    def _find_class(self) -> type:
        """Return the class of the model ``self.model``: of this package, RecBole, or the user.

        Raises:
            UsageError: if there is no such model; the message names the file that asks for it.
        """
        # MODELS has name -> class of this package's models and of those that users have registered;
        # ``list_runnable`` names these and the models of RecBole that can be run. Any other name is
        # refused by the last line, with the file that gave it (``sources``), if one did.
        if self.model in models.MODELS:
            return models.MODELS[self.model]
        if self.model in models.list_runnable():  # one of RecBole's
            return get_model(self.model)
        location = f"{self.sources['model']}: " if "model" in self.sources else ""
        raise UsageError(location + models.explain_unknown(self.model))

    def _merge_defaults(self) -> dict[str, Any]:
        """Return option -> value, of all options: what is given, and the defaults of the others.

        Four defaults depend on other options:

        - ``sce_above`` is None, so that the loss stays (:meth:`adapt_loss`), if a loss is given.
        - No negatives (items to contrast with the target) are sampled under cross-entropy.
        - ``train_batch_size`` of some models counts windows (pieces of a user's history).
        - The columns to read include the time.
        """
        # RecBole's names for defaults, and for the options that are given.
        defaults, given = self.internal_config_dict, self.external_config_dict
        final = {**defaults, **given}
        final["eval_args"] = {**defaults["eval_args"], **(given.get("eval_args") or {})}

        if "loss_type" in given and "sce_above" not in given:
            final["sce_above"] = None

        # RecBole's default is one negative, which it refuses itself under cross-entropy.
        is_sequential = final["MODEL_TYPE"] == ModelType.SEQUENTIAL
        has_all_items = is_sequential and final.get("loss_type") == "CE"
        if has_all_items and "train_neg_sample_args" not in given:
            final["train_neg_sample_args"] = None

        # A batch of RecBole's causal models (CAUSAL_BUILTINS, such as SASRec) holds whole histories
        # here, and not one target a row.
        has_windows = final["augmentation"] == "all_positions"
        if self.model in models.CAUSAL_BUILTINS and has_windows and "train_batch_size" not in given:
            final["train_batch_size"] = _WINDOWS_PER_BATCH  # RecBole's default is 2,048 rows
        final["load_col"] = sources.add_time_field(final)
        return final

    def _set_default_parameters(self) -> None:
        """Let RecBole derive values, then set ``data_path`` to the folder of the dataset itself.

        The installed RecBole comes with the dataset ml-100k. RecBole always takes that one; here
        one of the user's own below ``data_path`` comes first.
        """
        base = Path(str(self.final_config_dict["data_path"]))  # before RecBole changes it
        super()._set_default_parameters()
        folder = base / self.dataset
        in_wheel = WHEEL_DATASETS / self.dataset  # in the installed RecBole
        # ``benchmark_filename`` names files of the parts of a split, in place of one file.
        is_here = find_atomic_file(folder, self.dataset, "inter").is_file()
        is_here |= bool(self.final_config_dict["benchmark_filename"])
        if not is_here and find_atomic_file(in_wheel, self.dataset, "inter").is_file():
            folder = in_wheel
        self.final_config_dict["data_path"] = str(folder)
        if not self.final_config_dict["use_gpu"]:  # RecBole chooses the device by gpu_id only
            self.final_config_dict["gpu_id"] = ""

    def adapt_loss(self, num_items: int) -> None:
        """Replace the default loss, CE, by SCE if there are more items than ``sce_above``.

        CE scores all items at every position of a batch, SCE only some. CE stays where a part of
        the model or trainer needs it. ``self.plain`` has the options as they are written to the
        config.yaml of the run, which so names the new loss.

        Args:
            num_items: number of items of the dataset, which is read after the configuration.
        """
        # ``is_on_our_base``: the model extends the base class of this package, with any loss.
        limit = self["sce_above"]
        has_ce = models.is_on_our_base(self.model) and self["loss_type"] == "CE"
        # AttrFormer's posterior, which has the option prior_weight, is a cross-entropy itself.
        needs_ce = self["compile"] or self["target_window"] > 1 or "prior_weight" in self
        if limit is None or num_items <= limit or not has_ce or needs_ce:
            return
        defaults = read_properties("loss", "SCE").defaults  # of the options that this loss reads
        self.internal_config_dict.update(defaults)  # RecBole's name for all defaults
        for options in (self.final_config_dict, self.plain):
            options.update(defaults, loss_type="SCE")
        self.loss_reason = f"loss SCE instead of CE for more than {limit:,} items (sce_above)"

    # --- checks ---

    def _check_user_options(self) -> None:
        """Refuse unknown keys and wrong values of options that are given.

        ``self.external_config_dict`` has the options that are given. Each value is checked by the
        row of its option in the table of options, and replaced by what :func:`check_value` returns:
        the value in the type of that row, such as a float for a whole number.

        Raises:
            UsageError: naming the file and the option.
        """
        # The defaults of a custom model (``MODELS.added``) are its author's, and are checked too.
        # Options that only custom classes have (``self.free``) may hold anything.
        defaults = self.internal_config_dict
        if self.model in models.MODELS.added:
            for key, value in sources.own_defaults(self.model).items():
                if key not in self.free:
                    check_value(f"defaults of {self.model}", option_table.find_option(key), value)

        # Known keys are the options with a default, and model, dataset and plugins; but not what
        # RecBole computes and keeps among the options (DERIVED_KEYS).
        options = self.external_config_dict
        known = {*defaults, *EXTRA_KEYS, PLUGINS} - DERIVED_KEYS
        run_files = self._find_run_files()
        for key, value in list(options.items()):
            location = self.sources.get(key, _NO_FILE)  # the file that gave it, if one did
            # The config.yaml of a former run has all options, also those of a scheme or loss that
            # this run replaces by another (``describe_readers`` names it). They are dropped.
            if location in run_files and key not in known and sources.describe_readers(key):
                del options[key]
                continue
            self._require_known(key, location, known)
            option = option_table.find_option(key)
            # An option of RecBole's that has no effect here may only have its default.
            if option.refused and value != defaults[key]:
                raise UsageError(f"{location}: {key}: {option.refused}")
            # Of an option that is not in the table, or means something else in a custom class, only
            # the type of its default is known.
            if key in self.free or key not in option_table.OPTIONS:
                option = option_table.make_custom_option(key, defaults.get(key))
            options[key] = check_value(location, option, value)

    def _require_known(self, key: str, location: str, known: set[str]) -> None:
        """Raise an UnknownKey for a key that no option of this run has, and say what was meant.

        Args:
            key: the key.
            location: file that gave it, or "configuration".
            known: names of all options of this run.
        """
        if key in known:
            return

        # The key may be the name that other libraries give to an option, an option of another model
        # or position scheme, or misspelt.
        readers = sources.describe_readers(key)
        synonyms = [name for name in option_table.find_synonyms(str(key)) if name in known]
        if synonyms:
            advice = f"; here it is {' and '.join(synonyms)}"
        else:
            advice = f"; {readers}" if readers else nearest(str(key), known)
        if self.model in models.MODELS.added:
            advice += "; declare it by recbole_pos.register_model(..., defaults={...})"
        raise UnknownKey(
            f"{location}: unknown key {shown(key)}. {self.model} on {self.dataset} does not "
            f"read it{advice}",
            key,
        )

    def _find_run_files(self) -> list[str]:
        """Return those of the config files that are the config.yaml of a former run.

        A run writes every option into its config.yaml, and a person only some into a file. So a
        file with more than half of all options is taken for that of a run. ``self.files`` has pairs
        of a file and its options.
        """
        defaults = self.internal_config_dict
        counts = {str(file): len(defaults.keys() & content) for file, content in self.files}
        return [file for file, count in counts.items() if count > len(defaults) / 2]

    def _make_plain(self) -> dict[str, Any]:
        """Return option -> plain value, of all options, by which this run can be repeated.

        Plain values are what yaml can hold: numbers, text, lists and mappings. Paths are absolute,
        so that the run can be repeated from another working directory.
        """
        # Some options (_NOT_KEPT) are left out: RecBole computes them, or they have no effect here.
        # ``to_plain`` turns numpy's numbers and the like into Python's.
        final = self.final_config_dict
        plain = to_plain({key: value for key, value in final.items() if key not in _NOT_KEPT})
        plain.update(model=self.model, dataset=self.dataset)
        # A file, and STARTS, the folders of runs to start from; ``make_absolute`` keeps None.
        for key in ("item_vectors", *STARTS):
            plain[key] = make_absolute(plain[key])
        base = Path(str(final["data_path"]))
        if (base / self.dataset).is_dir():  # else the dataset is found in the installed RecBole
            plain["data_path"] = str(base.resolve())
        return plain

    def _refuse_unread(self) -> None:
        """Raise an UnknownKey for an option that the user gave although it has no effect here.

        An example is ``fusion`` with a position scheme that fuses nothing. Not refused is an option
        with its default value, and one from the dataset's file, a preset or a part of a file for
        certain models (under ``for``), since these are written for several models. ``self.plain``
        has the value of each option, ``self.sources`` the file that gave it, if one did.
        """
        # Gather what conditions are about: the kinds of models that this one belongs to, and all
        # options, where a key within an option is called ``eval_args.target``.
        schemes = sources.list_positions(self.plain.get("position"), self.model)
        kinds = models.list_kinds(self.model, self.internal_config_dict["MODEL_TYPE"], schemes)
        unread = models.find_unread_options(self.model)  # option -> reason
        defaults = option_table.flatten_options(self.internal_config_dict)
        config = option_table.flatten_options(self.plain)
        config["mask_history"] = masks_history(self.final_config_dict)  # None means: by the model

        # Take each option that the user gave with another value than its default, and find why
        # nothing reads it: the model does not, or a condition of its row is not met.
        for name, value in config.items():
            key = name.partition(".")[0]
            location = self.sources.get(key, _NO_FILE)
            by_user = key in self.external_config_dict and location in [*self.own_files, _NO_FILE]
            if not by_user or key in self.free or value in (None, defaults.get(name)):
                continue
            condition = option_table.find_unmet(name, config, kinds)
            reason = f": {unread[name]}" if name in unread else f", only {condition}"
            if name in unread or condition:
                advice = "leave it out"
                if location != _NO_FILE:
                    advice += ", or put it under `for` with the models that read it"
                raise UnknownKey(
                    f"{location}: {name} is not read by {self.model}{reason}; {advice}", key
                )

    @property
    def expected_counts(self) -> dict[str, int]:
        """Numbers that a public dataset must have, such as ``{"users": 943, "items": 1682}``.

        Empty for other datasets, and for a run whose filters (such as a smallest number of
        interactions) are not those in the dataset's yaml, to which the numbers belong.
        """
        # ``self.public`` has what the dataset's yaml says, and FILTERS are names of options.
        defaults = {**self.internal_config_dict, **self.public}
        has_its_filters = all(self[key] == defaults.get(key) for key in FILTERS)
        return self.public.get("counts", {}) if has_its_filters else {}


def to_plain_options(config: Config) -> dict[str, Any]:
    """Return option -> plain value, from which PosConfig makes the same configuration again.

    A PosConfig has kept them. Of a Config of RecBole's they are gathered: without values that
    RecBole has derived, and with the parent of the dataset's folder as ``data_path``, since
    RecBole has added the dataset's name to that.

    Args:
        config: a PosConfig, or a Config that RecBole's own functions have made.
    """
    if isinstance(config, PosConfig):
        return config.plain
    # RecBole keeps defaults and given options apart, beside the values that it derives from them.
    # EXTRA_KEYS are model and dataset; _NOT_KEPT are computed values, and options without effect.
    defaults = config.internal_config_dict
    options = {**defaults, **config.external_config_dict}
    plain = {key: options[key] for key in defaults if key not in _NOT_KEPT}
    plain |= {key: config[key] for key in EXTRA_KEYS}
    plain["data_path"] = str(Path(config["data_path"]).resolve().parent)
    schemes = sources.list_positions(options.get("position"), config["model"])
    if modules := find_modules(config["model"], schemes):  # that register custom classes
        plain[PLUGINS] = modules
    return to_plain(plain)
