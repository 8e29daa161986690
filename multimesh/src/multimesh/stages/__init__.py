"""`pipeline`: functions without marks become stages."""
