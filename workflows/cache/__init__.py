"""A Bazel cache that containers and checkouts of one machine share."""
