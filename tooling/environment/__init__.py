"""The Python environment: which Python, ``.venv``, and the packages in it."""
