"""From a placed program to fragments in the order of their schedule."""
