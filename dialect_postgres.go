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
	switch state := server.SQLState(); state {
	case "40001", "40P01": // serialization failure, deadlock
		return FailureRetry
	case "57P01", "57P02", "57P03", "57P05", "25P03": // shut down, crashed, starting up, idle too long
		return FailureConnection
	default:
		if strings.HasPrefix(state, "08") {
			return FailureConnection
		}
		return FailureOther
	}
}

// folder is the sub-folder of an embedded file system, whose names are known to
// be valid.
func folder(files embed.FS, name string) fs.FS {
	sub, err := fs.Sub(files, name)
	if err != nil {
		panic(err)
	}
	return sub
}
