"""The fleet: LLM replicas as a Ray Serve application, each one reachable at an address of its own."""
