//go:build unix

package main

import (
	"time"

	"golang.org/x/sys/unix"
)

// sharedNow is the time by a clock that all processes of a machine share and that
// nobody sets: the checker compares readings of different workers.
func sharedNow() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		panic(err) // every unix has that clock
	}
	return time.Duration(now.Nano())
}
