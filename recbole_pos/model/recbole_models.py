"""RecBole's models that train and evaluate through the plugin, and what each of them is.

Papers are those that RecBole's own source names; ``tests/test_listing.py`` compares them.
"""

SEQUENTIAL: dict[str, str] = {
    "SASRec": 'Causal self-attention over the history (Kang et al., "Self-Attentive Sequential '
    'Recommendation", ICDM 2018).',
    "GRU4Rec": 'A recurrent network over the history (Tan et al., "Improved Recurrent Neural '
    'Networks for Session-based Recommendations", DLRS 2016).',
    "BERT4Rec": "Self-attention in both directions, trained to fill in masked events (Sun et al., "
    '"BERT4Rec: Sequential Recommendation with Bidirectional Encoder Representations from '
    'Transformer", CIKM 2019).',
    "SRGNN": "A gated graph network over the items of a session, read out by attention to the last "
    'one (Wu et al., "Session-based Recommendation with Graph Neural Networks", AAAI 2019).',
    "NARM": "A recurrent network whose states are also weighted by attention (Li et al., "
    '"Neural Attentive Session-based Recommendation", CIKM 2017).',
    "STAMP": "Attention to the items of a session by its mean and its last item (Liu et al., "
    '"STAMP: Short-Term Attention/Memory Priority Model for Session-based Recommendation", '
    "KDD 2018).",
    "GCSAN": "SRGNN's graph network, then self-attention over the session (Xu et al., "
    '"Graph Contextualized Self-Attention Network for Session-based Recommendation", IJCAI 2019).',
    "FPMC": "A matrix of users and items plus one of transitions from the last item (Rendle et "
    'al., "Factorizing Personalized Markov Chains for Next-Basket Recommendation", WWW 2010).',
    "SASRecF": "SASRec with the attributes of items (selected_features) beside them at the input; "
    "an extension of RecBole's own, without a paper.",
    "LightSANs": "Self-attention to a few latent interests instead of all events (Fan et al., "
    '"Lighter and Better: Low-Rank Decomposed Self-Attention Networks for Next-Item '
    'Recommendation", SIGIR 2021).',
    "FEARec": "Self-attention in time and in frequency, with contrastive learning (Du et al., "
    '"Frequency Enhanced Hybrid Attention Network for Sequential Recommendation", SIGIR 2023).',
    "CORE": "A session is a weighted mean of its items' vectors, compared by cosine (Hou et al., "
    '"CORE: Simple and Effective Session-based Recommendation within Consistent Representation '
    'Space", SIGIR 2022).',
    "GRU4RecF": "Two recurrent networks, over items and over their attributes (selected_features) "
    '(Hidasi et al., "Parallel Recurrent Neural Network Architectures for Feature-rich '
    'Session-based Recommendations", RecSys 2016).',
    "FDSA": "Two self-attention networks, over items and over their attributes "
    '(selected_features) (Zhang et al., "Feature-level Deeper Self-Attention Network for '
    'Sequential Recommendation", IJCAI 2019).',
    "NextItNet": 'Dilated causal convolutions over the history (Yuan et al., "A Simple '
    'Convolutional Generative Network for Next Item Recommendation", WSDM 2019).',
    "Caser": "Convolutions over the newest events, along them and across them, with a vector of "
    'the user (Tang et al., "Personalized Top-N Sequential Recommendation via Convolutional '
    'Sequence Embedding", WSDM 2018).',
    "SHAN": "Two layers of attention: over the long history, then over its result and the newest "
    'items (Ying et al., "Sequential Recommender System based on Hierarchical Attention Network", '
    "IJCAI 2018).",
    "HGN": "Gates that choose features of items, then events, for each user (Ma et al., "
    '"Hierarchical Gating Networks for Sequential Recommendation", KDD 2019).',
    "SINE": "Several interests of a user, the active ones taken from a large pool (Tan et al., "
    '"Sparse-Interest Network for Sequential Recommendation", WSDM 2021).',
    "RepeatNet": "A recurrent network that decides between repeating an item and a new one (Ren et "
    'al., "RepeatNet: A Repeat Aware Neural Recommendation Machine for Session-based '
    'Recommendation", AAAI 2019).',
    "NPE": "What a user likes plus how items go with those clicked before (Nguyen et al., "
    '"NPE: Neural Personalized Embedding for Collaborative Filtering", IJCAI 2018).',
    "FOSSIL": "Similarity of items plus a Markov chain of the newest ones (He et al., "
    '"Fusing Similarity Models with Markov Chains for Sparse Sequential Recommendation", '
    "ICDM 2016).",
}
GENERAL: dict[str, str] = {
    "Pop": "The most popular items, the same for all users; without a paper.",
    "ItemKNN": "The items most similar to those of the user, by who has them (Aiolli et al., "
    '"Efficient top-n recommendation for very large scale binary rated datasets", RecSys 2013).',
    "BPR": "A vector for each user and item, trained on pairs of items (Rendle et al., "
    '"BPR: Bayesian Personalized Ranking from Implicit Feedback", UAI 2009).',
}
# Models with parameters for each user, which cannot score new users.
READ_USERS = frozenset("BPR Caser FOSSIL FPMC HGN ItemKNN NPE SHAN".split())


def reads_users(name: str, model_class: type) -> bool:
    """Return whether a model scores only the users it was trained with, not any history.

    Args:
        name: name of the model.
        model_class: class of the model; its attribute ``reads_users``, if any, decides.
    """
    return bool(getattr(model_class, "reads_users", name in READ_USERS))
