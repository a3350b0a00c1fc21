"""The whole thing on one machine: Ray Serve, the router, Envoy, and a conversation played through them."""
