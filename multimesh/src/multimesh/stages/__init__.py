"""`pipeline` and `sequential`: functions without marks become stages."""
