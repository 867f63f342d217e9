//go:build !unix

package integration

import (
	"errors"
	"os"
	"time"
)

func suspend(*os.Process) error { return errors.ErrUnsupported }
func resume(*os.Process) error  { return errors.ErrUnsupported }

// processTime returns 0: it is not known here.
func processTime() time.Duration { return 0 }
