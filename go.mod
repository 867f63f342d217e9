module github.com/seed-4c80c132/coord

go 1.26

require (
	github.com/DATA-DOG/go-sqlmock v1.5.2
	github.com/lib/pq v1.12.3
)
