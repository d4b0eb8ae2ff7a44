"""The tables of names: plugin models, position schemes, and RecBole's models that run here."""

from __future__ import annotations

from recbole_pos import recbole_models
from recbole_pos.model.anchored import AnchoredGCSAN, AnchoredSRGNN
from recbole_pos.model.attrformer import AttrFormer
from recbole_pos.model.base import PosRecommender
from recbole_pos.model.encoded import EncodedSASRec, EncodedSTAMP
from recbole_pos.model.fgnn import FGNN
from recbole_pos.model.fparec import FPARec, PARec
from recbole_pos.model.kernel_attention import KernelAttention
from recbole_pos.model.posrec import PosRec
from recbole_pos.model.sasrec import PosSASRec
from recbole_pos.model.session_baselines import SessionBPR, SessionFPMC, SessionKNN
from recbole_pos.model.session_pop import SPop
from recbole_pos.model.to_rope import TORoPE
from recbole_pos.position.additive import LearnedPosition, SinusoidalPosition
from recbole_pos.position.attribute_attention import DecoupledAttributes, TimeIntervalAttention
from recbole_pos.position.base import PositionScheme
from recbole_pos.position.bias import KERPLE, ALiBi, T5Bias
from recbole_pos.position.contextual import ContextualPosition, NoPosition
from recbole_pos.position.dual import (
    ALPE,
    ASPE,
    DPE,
    LDPE,
    LPE,
    LPE2D,
    LRPE,
    RSPE,
    SPE,
    SPE2D,
)
from recbole_pos.position.kernel import PositionalKernel
from recbole_pos.position.mixing import LinearAttention, TokenMixing
from recbole_pos.position.positional_attention import (
    AverageAttention,
    ExponentialAnnealing,
    FactorizedPositionMatrix,
    LinearAnnealing,
    PositionMatrix,
)
from recbole_pos.position.rotary import RotaryPosition
from recbole_pos.position.time_buckets import HSTUBias, TimeEmbedding
from recbole_pos.position.time_rotary import TimeOrderRotaryPosition, TimeRotaryPosition

MODELS: dict[str, type] = {
    "PosSASRec": PosSASRec,
    "KernelAttention": KernelAttention,
    "TORoPE": TORoPE,
    "FPARec": FPARec,
    "PARec": PARec,
    "PosRec": PosRec,
    "AttrFormer": AttrFormer,
}

# The plugin's other models, which take no position schemes or encodings alone (``position``).
BASELINES: dict[str, type] = {
    "SPop": SPop,
    "SessionKNN": SessionKNN,
    "SessionBPR": SessionBPR,
    "SessionFPMC": SessionFPMC,
    "FGNN": FGNN,
    "EncodedSTAMP": EncodedSTAMP,
    "EncodedSASRec": EncodedSASRec,
    "AnchoredSRGNN": AnchoredSRGNN,
    "AnchoredGCSAN": AnchoredGCSAN,
}

# A scheme is one class, one line here, and one yaml, properties/position/<name>.yaml.
SCHEMES: dict[str, type[PositionScheme]] = {
    "nope": NoPosition,
    "learned": LearnedPosition,
    "sinusoidal": SinusoidalPosition,
    "spe": SPE,
    "lpe": LPE,
    "rspe": RSPE,
    "lrpe": LRPE,
    "aspe": ASPE,
    "alpe": ALPE,
    "spe2d": SPE2D,
    "lpe2d": LPE2D,
    "dpe": DPE,
    "ldpe": LDPE,
    "time_learned": TimeEmbedding,
    "rope": RotaryPosition,
    "time_rope": TimeRotaryPosition,
    "to_rope": TimeOrderRotaryPosition,
    "alibi": ALiBi,
    "t5": T5Bias,
    "kerple": KERPLE,
    "hstu": HSTUBias,
    "cape": ContextualPosition,
    "difsr": DecoupledAttributes,
    "kernel": PositionalKernel,
    "tisas": TimeIntervalAttention,
    "parec": PositionMatrix,
    "fparec": FactorizedPositionMatrix,
    "average": AverageAttention,
    "linear_annealing": LinearAnnealing,
    "exponential_annealing": ExponentialAnnealing,
    "linear_attention": LinearAttention,
    "token_mixing": TokenMixing,
}

# RecBole's own models that train and evaluate through the plugin (tests/test_builtins.py).
BUILTIN_SEQUENTIAL = list(recbole_models.SEQUENTIAL)
BUILTIN_GENERAL = list(recbole_models.GENERAL)
# Of these, what makes the state after an event from the events up to it alone, for each of them.
CAUSAL_BUILTINS = "SASRec GRU4Rec SASRecF GRU4RecF FDSA".split()


def on_our_base(model: str) -> bool:
    """Whether a model is a ``PosRecommender``: it takes packed windows and either loss."""
    found = {**MODELS, **BASELINES}.get(model)
    return found is not None and issubclass(found, PosRecommender)


def trains_all_positions(model: str) -> bool:
    """Whether a model can learn from packed windows (``augmentation: all_positions``)."""
    return on_our_base(model) or model in CAUSAL_BUILTINS
