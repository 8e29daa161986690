"""How the processes of a job meet, learn of each other's end, and end together."""
