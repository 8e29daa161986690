"""How processes meet, agree, watch each other and end."""
