"""What pyproject.toml cannot say: the bundled model comes along, as files of ``anabranch``."""

from setuptools import find_packages, setup

ROOMS = ("anabranch*", "dht*", "coordinator*", "node*", "client*")

setup(
    packages=[*find_packages(include=ROOMS), "anabranch.brook"],
    package_dir={"anabranch.brook": "models/brook"},
)
