"""From any table to atomic files: ``recbole-pos convert``. Imports neither RecBole nor
torch."""
