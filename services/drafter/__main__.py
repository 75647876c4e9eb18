"""`python -m services.drafter`"""

from paceline.service import main
from services.drafter.drafter import body

if __name__ == "__main__":
    main("drafter", body)
