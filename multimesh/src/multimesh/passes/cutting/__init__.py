"""Fragments of a placed program, in the order of their schedule."""
