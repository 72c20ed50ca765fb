"""The page that the coordinator serves: plain HTML, CSS and JavaScript in `assets`, without a build step.

`assets/uplot.js` and `uplot.css` are uPlot 1.6.32, as published, with its licence (MIT) in the same directory.
"""
