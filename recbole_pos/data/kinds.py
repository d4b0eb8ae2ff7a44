"""Types and tables of columns in atomic files, and what a cell without a value looks like."""

KINDS = ("token", "token_seq", "float", "float_seq")
# Options that name fields to embed beside the vectors of items, and the tables these stand in.
SIDE_FEATURES = {"item_features": "item", "user_features": "user", "event_features": "inter"}
# What pandas takes for a missing value, in every column.
MISSING = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null"),
)
