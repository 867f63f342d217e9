//go:build exact

package sim

import _ "unsafe" // for go:linkname

// exact tells that the standard library of this program is patched: a seed repeats a run exactly.
const exact = true

// seedRuntime makes the runtime's random choices in bubbles follow from seed; 0 ends that.
//
//go:linkname seedRuntime runtime.simSeed
func seedRuntime(seed uint64)
