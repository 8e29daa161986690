"""Third-party sources: what is wanted, exactly which bytes, how they get here and how they are changed."""
