"""The plan of a program in fragments: slots, instructions, and a layout for every slot."""
