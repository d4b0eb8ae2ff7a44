"""RecBole's models that train and evaluate through the plugin, with a line about each."""

# Models of histories, then models of users and items without order.
SEQUENTIAL: dict[str, str] = {
    "SASRec": "Causal self-attention over the history (Kang et al., ICDM 2018).",
    "GRU4Rec": "A recurrent network over the history (Tan et al., DLRS 2016).",
    "BERT4Rec": "Self-attention both ways, fills in masked interactions (Sun et al., CIKM 2019).",
    "SRGNN": "A gated graph network over a session, read by attention (Wu et al., AAAI 2019).",
    "NARM": "A recurrent network, its states weighted by attention (Li et al., CIKM 2017).",
    "STAMP": "Attention by a session's mean and its last item (Liu et al., KDD 2018).",
    "GCSAN": "SRGNN's graph network, then self-attention (Xu et al., IJCAI 2019).",
    "FPMC": "Users by items, plus transitions from the last item (Rendle et al., WWW 2010).",
    "SASRecF": "SASRec with attributes of items at the input (selected_features); no paper.",
    "LightSANs": "Self-attention to a few latent interests (Fan et al., SIGIR 2021).",
    "FEARec": "Self-attention in time and frequency, contrastive (Du et al., SIGIR 2023).",
    "CORE": "A weighted mean of items, compared by cosine (Hou et al., SIGIR 2022).",
    "GRU4RecF": "A recurrent network each for items and attributes (Hidasi et al., RecSys 2016).",
    "FDSA": "Self-attention each over items and attributes (Zhang et al., IJCAI 2019).",
    "NextItNet": "Dilated causal convolutions over the history (Yuan et al., WSDM 2019).",
    "Caser": "Convolutions over the newest interactions and a user's vector (Tang et al., WSDM "
    "2018).",
    "SHAN": "Attention to the long history, then to the newest items (Ying et al., IJCAI 2018).",
    "HGN": "Gates that choose features, then interactions, for each user (Ma et al., KDD 2019).",
    "SINE": "A user's active interests from a large pool (Tan et al., WSDM 2021).",
    "RepeatNet": "A recurrent network that repeats an item or not (Ren et al., AAAI 2019).",
    "NPE": "A user's taste plus how items go together (Nguyen et al., IJCAI 2018).",
    "FOSSIL": "Similarity of items plus a Markov chain (He et al., ICDM 2016).",
}
GENERAL: dict[str, str] = {
    "Pop": "The most popular items, the same for all users; without a paper.",
    "ItemKNN": "The items most similar to those of the user (Aiolli et al., RecSys 2013).",
    "BPR": "A vector for each user and item, from pairs of items (Rendle et al., UAI 2009).",
}
_NO_USE = "RecBole's computation does not use it"
# Options that a model takes and does not read, and why not.
UNREAD: dict[str, dict[str, str]] = {
    "BERT4Rec": {"target_events": "it learns masked interactions of every kind"},
    "CORE": {"initializer_range": _NO_USE},
    "FEARec": dict.fromkeys(
        "n_heads attn_dropout_prob lmd lmd_sem fredom fredom_type std".split(), _NO_USE
    ),
    "FPMC": {"MAX_ITEM_LIST_LENGTH": "it knows the last item of a history only"},
    "SINE": {"reg_loss_ratio": _NO_USE},
}
# Models with parameters for each user, which cannot score new users.
READ_USERS = frozenset("BPR Caser FOSSIL FPMC HGN ItemKNN NPE SHAN".split())


def reads_users(name: str, model_class: type) -> bool:
    """Return whether a model can score only the users it was trained with, not any history.

    Args:
        name: name of the model.
        model_class: class of the model, whose attribute ``reads_users`` decides if it has one.
    """
    return bool(getattr(model_class, "reads_users", name in READ_USERS))
