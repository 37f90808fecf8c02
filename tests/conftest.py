"""Tests that need a GPU carry the marker gpu; elsewhere they are skipped."""
import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an NVIDIA or AMD GPU")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="PyTorch finds no GPU"))


def pytest_terminal_summary(terminalreporter, config):
    opened = getattr(config, "opened_in_perfetto", 0)
    if opened:
        terminalreporter.write_line(f"Perfetto opened {opened} traces and showed all of each.")
