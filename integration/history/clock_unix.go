//go:build unix

package history

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now is the time by a clock that all processes of a machine share and that nobody
// sets.
func Now() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err) // every unix has that clock
	}
	return time.Duration(now.Nano())
}
