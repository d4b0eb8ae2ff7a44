"""Which targets AttrFormer learns beside the next item, from its options (section 3.2.3)."""

from __future__ import annotations

from recbole_pos.errors import UsageError
from recbole_pos.values import Options, is_number, shown


def posterior_options(config: Options) -> tuple[list[float], float]:
    """beta of equation 17 and the weight of its prior.

    Raises:
        UsageError: if they are no such weights, or the loss cannot have them.
    """
    betas, weight = config["future_weights"], config["prior_weight"]
    listed = isinstance(betas, (list, tuple)) and len(betas) > 0
    if not listed or not all(map(is_number, betas)) or betas[0] <= 0 or min(betas) < 0:
        raise UsageError(
            "future_weights: expected weights of the next items, the first above 0, such as "
            f"[1.0, 0.25]; found {shown(betas)}"
        )
    if any(later > sooner for sooner, later in zip(betas, betas[1:], strict=False)):
        raise UsageError(f"future_weights: must not rise (section 3.2.3); found {shown(betas)}")
    plain = weight == 0 and betas[0] == 1 and not any(betas[1:])
    if config["loss_type"] != "CE" and not plain:
        raise UsageError(
            f"loss_type: {config['loss_type']} cannot have posterior targets; set "
            "prior_weight: 0.0 and future_weights: [1.0], or loss_type: CE"
        )
    return [1.0] if plain else [float(b) for b in betas], float(weight)
