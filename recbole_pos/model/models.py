"""The tables of models: those of the plugin, and RecBole's that run here."""

from __future__ import annotations

from collections import ChainMap

from recbole_pos.model import recbole_models
from recbole_pos.tables import Table

MODELS = Table(
    "model",
    {
        "PosSASRec": "recbole_pos.model.sasrec:PosSASRec",
        "KernelAttention": "recbole_pos.model.kernel_attention:KernelAttention",
        "TORoPE": "recbole_pos.model.to_rope:TORoPE",
        "FPARec": "recbole_pos.model.fparec:FPARec",
        "PARec": "recbole_pos.model.fparec:PARec",
        "PosRec": "recbole_pos.model.posrec:PosRec",
        "AttrFormer": "recbole_pos.model.attrformer:AttrFormer",
    },
)

# The plugin's other models, which take no position schemes or encodings alone (``position``).
BASELINES = Table(
    "model",
    {
        "SPop": "recbole_pos.model.session_pop:SPop",
        "SessionKNN": "recbole_pos.model.session_baselines:SessionKNN",
        "SessionBPR": "recbole_pos.model.session_baselines:SessionBPR",
        "SessionFPMC": "recbole_pos.model.session_baselines:SessionFPMC",
        "FGNN": "recbole_pos.model.fgnn:FGNN",
        "EncodedSTAMP": "recbole_pos.model.encoded:EncodedSTAMP",
        "EncodedSASRec": "recbole_pos.model.encoded:EncodedSASRec",
        "AnchoredSRGNN": "recbole_pos.model.anchored:AnchoredSRGNN",
        "AnchoredGCSAN": "recbole_pos.model.anchored:AnchoredGCSAN",
    },
)
OURS = ChainMap(MODELS, BASELINES)

# RecBole's own models that train and evaluate through the plugin (tests/test_builtins.py).
BUILTIN_SEQUENTIAL = list(recbole_models.SEQUENTIAL)
BUILTIN_GENERAL = list(recbole_models.GENERAL)
# Of these, what makes the state after an event from the events up to it alone, for each of them.
CAUSAL_BUILTINS = "SASRec GRU4Rec SASRecF GRU4RecF FDSA".split()


def on_our_base(model: str) -> bool:
    """Whether a model is a ``PosRecommender``: it takes packed windows and either loss."""
    from recbole_pos.model.base import PosRecommender

    return model in OURS and issubclass(OURS[model], PosRecommender)
