#!/bin/bash
# The entrypoint of the image that postgres-image builds where none can be
# pulled. It takes the official image's variables and arguments, as far as tests
# need them: POSTGRES_USER, POSTGRES_PASSWORD, POSTGRES_DB, POSTGRES_INITDB_ARGS,
# POSTGRES_HOST_AUTH_METHOD and PGDATA; nothing, options, `postgres -c ...` or
# another command.
set -euo pipefail

export PGDATA=${PGDATA:-/var/lib/postgresql/data}
export POSTGRES_USER=${POSTGRES_USER:-postgres}
export POSTGRES_DB=${POSTGRES_DB:-$POSTGRES_USER}
export POSTGRES_HOST_AUTH_METHOD=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}

init_cluster() {
	if [[ -z ${POSTGRES_PASSWORD:-} && $POSTGRES_HOST_AUTH_METHOD != trust ]]; then
		echo 'POSTGRES_PASSWORD is not set' >&2
		exit 1
	fi
	# shellcheck disable=SC2086 # POSTGRES_INITDB_ARGS is a list of words.
	initdb --username="$POSTGRES_USER" --pwfile=<(printf '%s\n' "${POSTGRES_PASSWORD:-}") \
		--auth-local=trust ${POSTGRES_INITDB_ARGS:-} >/dev/null
	echo "host all all all $POSTGRES_HOST_AUTH_METHOD" >>"$PGDATA/pg_hba.conf"
	echo "listen_addresses = '*'" >>"$PGDATA/postgresql.conf"
	# Single-user mode: a server that listens before the database is there
	# would look ready too early.
	if [[ $POSTGRES_DB != postgres ]]; then
		postgres --single postgres >/dev/null <<<"CREATE DATABASE \"$POSTGRES_DB\""
	fi
}

if [[ $# == 0 || $1 == -* ]]; then
	set -- postgres "$@"
fi
if [[ $1 != postgres || " $* " =~ \ (--version|-V|--help|-\?)\  ]]; then
	exec "$@"
fi
if [[ $(id -u) == 0 ]]; then
	install -d -o postgres -g postgres -m 0700 "$PGDATA"
	install -d -o postgres -g postgres -m 2775 /var/run/postgresql
	exec setpriv --reuid=postgres --regid=postgres --init-groups "$0" "$@"
fi
if [[ ! -s $PGDATA/PG_VERSION ]]; then
	init_cluster
fi
exec "$@"
