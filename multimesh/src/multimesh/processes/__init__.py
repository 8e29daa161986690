"""Many processes: how they meet, agree and end."""
