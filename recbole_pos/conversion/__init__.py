"""From files of one's own to atomic files: ``recbole-pos convert``. Imports neither RecBole nor
torch."""
