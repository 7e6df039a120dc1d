"""What pyproject.toml cannot say: the configs, which lie beside the package in a clone, are data of it in a wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["specjax", "specjax.*"]), "specjax.configs"],
    package_dir={"specjax.configs": "configs"},
)
