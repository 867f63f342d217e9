package coord

import (
	"context"
	"database/sql/driver"
	"embed"
	"errors"
	"io/fs"
	"strings"
)

//go:embed sql/sqlite/*.sql
var sqliteFiles embed.FS

// SQLite is SQLite 3.42 or newer: one machine, no server, for development, tests
// and small installations. Set busy_timeout in the data source name (a second or
// more) and, for a file that several processes use, journal_mode=WAL; with
// modernc.org/sqlite that is "file:app.db?_pragma=busy_timeout(5000)&_pragma=journal_mode(WAL)".
// A database in memory is one per connection: limit the pool to one, or use
// "file:/name?vfs=memdb". Names of tables do not differ by case there, and a guarded
// transaction holds up every write to the file, renewals included.
var SQLite Dialect = sqlite{}

type sqlite struct{}

func (sqlite) Name() string { return "sqlite" }

func (sqlite) SQL() fs.FS { return folder(sqliteFiles, "sql/sqlite") }

func (sqlite) Classify(err error) Failure {
	if errors.Is(err, driver.ErrBadConn) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return FailureConnection
	}
	const busy, locked = 5, 6 // SQLITE_BUSY and SQLITE_LOCKED; extended codes keep them in the low byte
	var coded interface{ Code() int }
	if errors.As(err, &coded) {
		if code := coded.Code() & 0xff; code == busy || code == locked {
			return FailureRetry
		}
		return FailureOther
	}
	if strings.Contains(err.Error(), "is locked") { // drivers without Code: "database is locked", "database table is locked"
		return FailureRetry
	}
	return FailureOther
}
