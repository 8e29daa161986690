"""The partitioner: small pure passes from a jaxpr to a plan, one file each."""
