//go:build race

package integration

// underRace is true with the race detector, which slows SQLite down twenty times:
// its driver is SQLite's own code, translated to Go.
const underRace = true
