"""Campaigns with docker: docker-compose.yml, and the pods of deploy/kubernetes as containers, watched from outside."""
