//go:build !unix

package history

import "time"

// Now is the time by a clock that the processes of a machine share. It is the wall
// clock here, which may be set during a run.
func Now() time.Duration { return time.Duration(time.Now().UnixNano()) }
