"""What frameworks of federated learning send and save: recorded, and compared with the simulated client."""
