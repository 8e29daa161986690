"""Cuts a placed program into fragments, and orders them by their schedule."""
