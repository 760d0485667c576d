"""The frozen values that a plan consists of; they decide nothing."""
