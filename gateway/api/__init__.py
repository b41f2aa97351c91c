"""The REST interface: typed requests, endpoints, responses."""
