"""Text and parquet as columns, read by DuckDB, and the memory that they may take."""
