"""Zhao, Papernot, Singh, Polyzotis & Odena 2019, Improving Differentially Private Models with Active Learning."""
