"""Third-party sources: the wanted components, their exact bytes, their way here and their patches."""
