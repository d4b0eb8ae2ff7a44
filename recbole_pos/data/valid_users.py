"""Validation on a sample of users (``valid_users``), which makes it cheap for millions of users.

In: the targets of validation and the names of their users. Out: those of the sample, which depends
on the names only, so it is the same for all models, seeds, machines and orders of the file.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from recbole_pos.data.splits import PHASES, VALID
from recbole_pos.values import Options


def find_validation_rows(config: Options, dataset: Any) -> np.ndarray:
    """Return which validation targets are evaluated: all, or those of a sample of the users.

    Args:
        config: options; ``valid_users`` is the size of the sample, None for all users.
        dataset: the dataset of any phase; its validation targets are numbered from 0 in the order
            of the interactions.

    Returns:
        [n] int64 numbers of the targets, in ascending order.
    """
    split = dataset.split
    users = split.log.users.numpy()[split.find_targets(VALID)]
    if config["valid_users"] is None:
        return np.arange(len(users))
    names = dataset.field2id_token[dataset.uid_field]
    return np.flatnonzero(np.isin(users, sample_users(users, names, config["valid_users"])))


def sample_users(users: np.ndarray, names: np.ndarray, num_users: int) -> np.ndarray:
    """Return the ids of a random sample of users, [num_users] int64 or fewer if there are fewer.

    A user's random number is a digest (hash) of the name, so every run has the same; the users with
    the smallest numbers are taken.

    Args:
        users: [targets] int64 ids to choose from, which may occur several times.
        names: [users] name of each user by id.
        num_users: size of the sample.
    """
    # A digest (hash) of 8 bytes, such as that of "valid ann", read as one whole number.
    ids = np.unique(users)
    digests = [
        hashlib.blake2b(f"{PHASES[VALID]} {name}".encode(), digest_size=8).digest()
        for name in names[ids].tolist()
    ]
    numbers = np.array([int.from_bytes(digest, "little") for digest in digests], dtype=np.uint64)
    return ids[np.argsort(numbers, kind="stable")[:num_users]]


def add_sample(summary: dict[str, Any], config: Options) -> dict[str, Any]:
    """Return the summary of a split, with ``valid_users`` if validation is on a sample of users.

    Args:
        summary: counts of the split; those of validation targets stay those of all users.
        config: options; ``valid_users`` is the size of the sample, None for all users, with which
            the summary is returned as it is.
    """
    if config["valid_users"] is None:
        return summary
    return {**summary, "valid_users": config["valid_users"]}
