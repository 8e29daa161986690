"""The command: flags, checks, translation, launch. It never imports JAX."""
