//go:build !unix

package testdb

import (
	"context"
	"fmt"
	"runtime"
)

func onMachine(context.Context) (*server, error) {
	return nil, fmt.Errorf("server programs: %w on %s", errAbsent, runtime.GOOS)
}
