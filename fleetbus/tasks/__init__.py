"""Tasks: Fleet's JSON files, Harbor folders and versioned places read, and written as files and Parquet."""
