package coord

import (
	"embed"
	"errors"
	"io/fs"
	"strings"
)

//go:embed sql/postgres/*.sql
var postgresFiles embed.FS

// Postgres is PostgreSQL 14 or newer, through lib/pq, pgx's stdlib or any other
// driver whose errors have a method SQLState() string.
var Postgres Dialect = postgres{}

type postgres struct{}

func (postgres) Name() string { return "postgres" }

func (postgres) SQL() fs.FS { return folder(postgresFiles, "sql/postgres") }

func (postgres) Classify(err error) Failure {
	var server interface{ SQLState() string }
	if !errors.As(err, &server) {
		return FailureConnection // The server did not say it, so the driver gave up.
	}
	state := server.SQLState()
	switch state {
	case "40001", "40P01", "57014": // Serialization failure, deadlock; cancelled by the server, not by us.
		return FailureRetry
	case "55P03":
		return FailureContended // The lock_timeout of an acquisition: a rival's insert is not committed.
	}
	if len(state) == 5 && strings.Contains(statementClasses, " "+state[:2]+" ") {
		return FailureOther
	}
	return FailureConnection
}

// statementClasses are the classes of errors that a statement brings about by itself. After
// any other the connection is not trusted: the server may be read-only (25006), shutting
// down (57P01), out of something (53xxx) or out of order (0A000, XX000).
const statementClasses = " 02 20 21 22 23 24 27 28 2B 2F 34 38 39 3B 3D 3F 40 42 44 54 55 P0 "

// folder is the sub-folder of an embedded file system, whose names are known to
// be valid.
func folder(files embed.FS, name string) fs.FS {
	sub, err := fs.Sub(files, name)
	if err != nil {
		panic(err)
	}
	return sub
}
