"""Environments and engines without anything outside."""
