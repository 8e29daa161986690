"""How processes meet, agree, save and end."""
