"""Forms of dates as regular expressions, and the seconds of what they match."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import compute as pc

from recbole_pos.errors import UsageError
from recbole_pos.values import shown

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")

# A form has two halves, which meet at the first colon: a log has far fewer days and hours than
# moments, and only different texts are looked at.
_ZONE = r"(?: ?(?P<z>Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?))?"
_HOUR = r"(?:(?:T|,? +)(?P<H>\d{1,2}))?"
_REST = (
    r"(?:(?P<M>\d{2})(?::(?P<S>\d{2})(?:[.,](?P<f>\d{1,9}))?)?(?: ?(?P<p>[AaPp]\.?[Mm]\.?))?"
    + _ZONE
    + ")?"
)
_WEEKDAY = r"(?:[A-Za-z]{3,9},? )?"
_MONTH = r"(?P<B>[A-Za-z]{3})[a-z]*\.?"
_DAY, _YEAR = r"(?P<d>\d{1,2})", r"(?P<Y>\d{4})"
_ISO = rf"{_YEAR}[-/.](?P<m>\d{{1,2}})[-/.]{_DAY}"
_TH = "(?:st|nd|rd|th)?"
Form = tuple[str, str]
FORMS: dict[str, Form] = {
    "year first": (_ISO + _HOUR, _REST),
    "day, month by name": (rf"{_WEEKDAY}{_DAY}{_TH}[ -]{_MONTH},?[ -]{_YEAR}{_HOUR}", _REST),
    "month by name": (rf"{_WEEKDAY}{_MONTH} {_DAY}{_TH},? {_YEAR}{_HOUR}", _REST),
    "as of Unix": (
        rf"[A-Za-z]{{3}} {_MONTH} +{_DAY} (?P<H>\d{{2}})",
        rf"(?P<M>\d{{2}}):(?P<S>\d{{2}}){_ZONE} {_YEAR}",
    ),
}
# Which of the first two is the day, only the column as a whole can tell.
SLASHES = (rf"(?P<a>\d{{1,2}})[-/.](?P<b>\d{{1,2}})[-/.]{_YEAR}{_HOUR}", _REST)
_COMPACT = {
    8: r"(?P<Y>(?:19|20)\d{2})(?P<m>\d{2})(?P<d>\d{2})",
    14: r"(?P<Y>(?:19|20)\d{2})(?P<m>\d{2})(?P<d>\d{2})(?P<H>\d{2})(?P<M>\d{2})(?P<S>\d{2})",
}
_DIRECTIVES = {
    **{"Y": _YEAR, "y": r"(?P<y>\d{2})", "m": r"(?P<m>\d{1,2})", "d": _DAY},
    **{"H": r"(?P<H>\d{1,2})", "I": r"(?P<H>\d{1,2})", "M": r"(?P<M>\d{1,2})"},
    **{"S": r"(?P<S>\d{1,2})", "f": r"(?P<f>\d{1,9})", "p": r"(?P<p>[AaPp]\.?[Mm]\.?)"},
    **{"B": _MONTH, "b": _MONTH, "A": "[A-Za-z]+", "a": "[A-Za-z]+", "%": "%"},
    **{"z": r"(?P<z>Z|UTC|GMT|[+-]\d{2}(?::?\d{2})?)", "Z": "(?P<z>Z|UTC|GMT)"},
}
_SHORT = {"%T": "%H:%M:%S", "%R": "%H:%M", "%F": "%Y-%m-%d", "%D": "%m/%d/%y"}


def compact_form(values: np.ndarray) -> Form | None:
    """That of whole numbers such as 20240302, if all have as many digits as one; else None."""
    digits = {len(str(abs(int(value)))) for value in (values.min(), values.max())}
    pattern = _COMPACT.get(digits.pop()) if len(digits) == 1 else None
    return (pattern, "") if pattern else None


def read_form(date_format: str) -> Form:
    """The halves of a form such as %d/%m/%Y %H:%M.

    Raises:
        UsageError: if it is none.
    """
    for short, long in _SHORT.items():
        date_format = date_format.replace(short, long)
    left, _, right = date_format.partition(":")
    text = _pattern(left) + _pattern(right)
    names = re.findall(r"\?P<(\w)>", text)
    day = {"d"} <= set(names) and {"m", "B"} & set(names) and {"Y", "y"} & set(names)
    if not day or len(set(names)) < len(names):
        raise UsageError(
            f"date_format: {shown(date_format)} must have day, month and year, and each once, "
            f"as in "
            "%d/%m/%Y %H:%M"
        )
    return _pattern(left), _pattern(right)


def form_width(date_format: str) -> int:
    """How many digits a date in a form of digits alone has, such as 8 for %d%m%Y; 0 for others."""
    parts = re.fullmatch(r"(?:%[dmYyHMS])+", date_format)
    return sum(4 if part == "Y" else 2 for part in date_format[1::2]) if parts else 0


def _pattern(date_format: str) -> str:
    """The regular expression of a part of a form."""
    text = ""
    for place, part in enumerate(re.split(r"%(.)", date_format)):
        if place % 2 == 0:
            text += re.escape(part).replace(r"\ ", " ")
        elif part in _DIRECTIVES:
            text += _DIRECTIVES[part]
        else:
            raise UsageError(
                f"date_format: %{part} is not known; known are %{', %'.join(_DIRECTIVES)}"
            )
    return text


class Halves:
    """Texts cut at their first colon, and the different halves.

    Args:
        text: [texts] of Arrow.
    """

    def __init__(self, text: Any) -> None:
        if isinstance(text, pa.ChunkedArray):
            text = text.combine_chunks()
        cut = pc.split_pattern(text, ":", max_splits=1)
        ends = cut.offsets.to_numpy()
        second = pa.array(ends[:-1] + 1, mask=np.diff(ends) < 2)
        halves = (cut.values.take(at) for at in (pa.array(ends[:-1]), second))
        self.halves = [half.fill_null("").dictionary_encode() for half in halves]

    def parts(self, form: Form) -> dict[str, np.ndarray]:
        """Named groups of a form as [texts] numbers: -1 where they are absent.

        ``fits`` says where both halves match; if they do nowhere, there is nothing else.
        """
        parts: dict[str, np.ndarray] = {}
        for half, regex in zip(self.halves, form, strict=True):
            codes = half.indices.to_numpy()
            groups = _groups(half.dictionary, regex)
            fits = groups.pop("fits")[codes]
            parts["fits"] = parts["fits"] & fits if parts else fits
            if not fits.any():
                return {"fits": fits}
            parts |= {name: values[codes] for name, values in groups.items()}
        return parts


def _groups(text: Any, regex: str) -> dict[str, np.ndarray]:
    """Named groups of a regular expression in different texts."""
    names = re.findall(r"\?P<(\w)>", regex)
    if not names:
        fits = pc.match_substring_regex(text, f"^(?:{regex})$")
        return {"fits": fits.to_numpy(zero_copy_only=False)}
    found = pc.extract_regex(text, f"^(?:{regex})$")
    parts = {"fits": found.is_valid().to_numpy(zero_copy_only=False)}
    for place, name in enumerate(names):
        group = pc.struct_field(found, [place]).fill_null("")
        if name == "B":
            lower = pc.utf8_lower(pc.utf8_slice_codeunits(group, 0, 3))
            number = pc.index_in(lower, pa.array(_MONTHS)).fill_null(-2).to_numpy() + 1
            parts["m"] = number.astype(np.int64)
        elif name == "z":
            parts[name] = _offsets(group)
        elif name == "p":
            after = pc.starts_with(pc.utf8_lower(group), "p").to_numpy(zero_copy_only=False)
            parts[name] = np.where(pc.binary_length(group).to_numpy() == 0, -1, after.astype(int))
        elif name == "f":
            group = pc.utf8_rpad(pc.if_else(pc.equal(group, ""), "0", group), 9, "0")
            parts[name] = group.cast(pa.int64()).to_numpy()
        else:
            parts[name] = pc.if_else(pc.equal(group, ""), "-1", group).cast(pa.int64()).to_numpy()
    if "y" in parts:  # as POSIX has it
        y = parts.pop("y")
        parts["Y"] = np.where(y < 0, -1, np.where(y < 69, 2000 + y, 1900 + y))
    return parts


def _offsets(zone: Any) -> np.ndarray:
    """[n] seconds that a clock is ahead of UTC; 0 without a zone."""
    digits = pc.replace_substring_regex(zone, "[^0-9]", "")
    hours = pc.utf8_rpad(digits, 4, "0").cast(pa.int64()).to_numpy()
    behind = pc.starts_with(zone, "-").to_numpy(zero_copy_only=False)
    return np.where(behind, -1, 1) * (hours // 100 * 3600 + hours % 100 * 60)


def seconds_of(parts: dict[str, np.ndarray]) -> np.ndarray:
    """[n] float64 of the parts of dates; nan where there is no such date or clock."""
    if not parts["fits"].any():
        return np.full(len(parts["fits"]), np.nan)
    year, month, day = parts["Y"], parts["m"], parts["d"]
    right = parts["fits"] & (year >= 1) & (month >= 1) & (month <= 12) & (day >= 1)
    months = (np.where(right, (year - 1970) * 12 + month - 1, 0)).astype("datetime64[M]")
    length = ((months + 1).astype("datetime64[D]") - months.astype("datetime64[D]")).astype(int)
    right &= day <= length
    hour, minute, second = (np.maximum(parts.get(key, np.int64(0)), 0) for key in "HMS")
    half = parts.get("p", np.int64(-1))
    right &= (minute < 60) & (second < 60) & (hour < 24)
    right &= (half < 0) | ((hour >= 1) & (hour <= 12))
    hour = np.where(half < 0, hour, hour % 12 + 12 * half)
    days = months.astype("datetime64[D]").astype(np.int64) + day - 1
    clock = hour * 3600 + minute * 60 + second - parts.get("z", np.int64(0))
    total = days * 86400 + clock + parts.get("f", np.int64(0)) / 1e9
    return np.where(right, total, np.nan)
