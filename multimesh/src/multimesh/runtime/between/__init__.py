"""Transfers between processes: transports, and the exchange of one process with the others."""
