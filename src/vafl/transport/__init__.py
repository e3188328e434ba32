"""Carry messages between parties: encoding, gRPC, alignment streams, identity."""
